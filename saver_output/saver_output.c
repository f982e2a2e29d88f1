//==============================================================================
//
//  Copyright (c) 2020-2023 Qualcomm Technologies, Inc.
//  All Rights Reserved.
//  Confidential and Proprietary - Qualcomm Technologies, Inc.
//
//==============================================================================

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "QnnInterface.h"

#define VALIDATE(res, value) \
   do { \
      if (res == 0 || res == QNN_COMMON_ERROR_NOT_SUPPORTED) \
      { \
         res = value; \
         if (res != 0) \
         { \
            if (res == QNN_COMMON_ERROR_NOT_SUPPORTED) \
            { \
               printf("WARNING! Line %d QNN feature/API not supported\n", __LINE__); \
            } else { \
               printf("ERROR! Line %d with error value: %d\n", __LINE__, (unsigned int)error); \
            } \
         } \
      } \
   } \
   while(0)

int main(int argc, char** argv) {
   Qnn_ErrorHandle_t error = 0;
   QnnLog_Level_t logLevel = QNN_LOG_LEVEL_ERROR;
   int logging = 0;
   for (int i = 1; i < argc; i++) {
     char* arg = argv[i];
     if (!strcmp("--logging", arg) || !strcmp("-l", arg)) {
       logging = 1;
       if (i+1 == argc) {
         printf("No log level provided, defaulting to QNN_LOG_LEVEL_ERROR\n");
         break;
       }
       char* value = argv[++i];
       if (!strcmp("error", value)) {
         logLevel = QNN_LOG_LEVEL_ERROR;
       } else if (!strcmp("warn", value)) {
         logLevel = QNN_LOG_LEVEL_WARN;
       } else if (!strcmp("info", value)) {
         logLevel = QNN_LOG_LEVEL_INFO;
       } else if (!strcmp("debug", value)) {
         logLevel = QNN_LOG_LEVEL_DEBUG;
       } else if (!strcmp("verbose", value)) {
         logLevel = QNN_LOG_LEVEL_VERBOSE;
       } else {
         printf("WARNING: Unknown log level provided: %s, defaulting to QNN_LOG_LEVEL_ERROR\n", value);
       }
     } else {
       printf("Usage: %s [options]\n\n"
              "-l <level>, --logging <level>      Enable logging, acceptable levels are: error,warn,info,debug,verbose\n", argv[0]);
       return -1;
     }
   }

   FILE* fp = fopen("params.bin", "rb");
   if (!fp) {
     error = -1;
     printf("ERROR! Could not open params.bin, ensure this file is in the current working directory when executing this program.\n");
     return error;
   }

   const QnnInterface_t** providerList = NULL;
   uint32_t numProviders;
   VALIDATE(error, QnnInterface_getProviders(&providerList, &numProviders));
   QNN_INTERFACE_VER_TYPE interface = providerList[0]->QNN_INTERFACE_VER_NAME;

   Qnn_LogHandle_t loghandle= NULL;
   if (logging) {
     VALIDATE(error, interface.logCreate(NULL, logLevel, &loghandle));
   }

   const QnnBackend_Config_t* backend_0_config_0[] = {NULL};
   Qnn_BackendHandle_t backend_0;
   VALIDATE(error, interface.backendCreate(loghandle, backend_0_config_0, &backend_0));

   VALIDATE(error, interface.propertyHasCapability((QnnProperty_Key_t)1501));

   const QnnDevice_Config_t* device_0_config_0[] = {NULL};
   Qnn_DeviceHandle_t device_0;
   VALIDATE(error, interface.deviceCreate(loghandle, device_0_config_0, &device_0));

   const QnnContext_Config_t* context_0_config_0[] = {NULL};
   Qnn_ContextHandle_t context_0;
   VALIDATE(error, interface.contextCreate(backend_0, device_0, context_0_config_0, &context_0));

   Qnn_Param_t* company_0_params = NULL;
   uint32_t company_0_input_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t company_0_input_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t company_0_input_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t company_0_input_0_v1 = {0, "i0", (Qnn_TensorType_t)0, 0, (Qnn_DataType_t)562, company_0_input_0_quantizeParams, 2, company_0_input_0_dims, (Qnn_TensorMemType_t)0, company_0_input_0_clientBuf};
   Qnn_Tensor_t company_0_input_0 = {(Qnn_TensorVersion_t)1, .v1 = company_0_input_0_v1};

   Qnn_Tensor_t company_0_inputs[] = {company_0_input_0};
   uint32_t company_0_output_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t company_0_output_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t company_0_output_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t company_0_output_0_v1 = {0, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, company_0_output_0_quantizeParams, 2, company_0_output_0_dims, (Qnn_TensorMemType_t)0, company_0_output_0_clientBuf};
   Qnn_Tensor_t company_0_output_0 = {(Qnn_TensorVersion_t)1, .v1 = company_0_output_0_v1};

   Qnn_Tensor_t company_0_outputs[] = {company_0_output_0};
   Qnn_OpConfigV1_t company_0_v1 = {"company", "qti.aisw", "ElementWiseNeg", 0, company_0_params, 1, company_0_inputs, 1, company_0_outputs};
   Qnn_OpConfig_t company_0 = {(Qnn_OpConfigVersion_t)1, .v1 = company_0_v1};
   VALIDATE(error, interface.backendValidateOpConfig(backend_0, company_0));

   Qnn_Param_t* probe_0_params = NULL;
   uint32_t probe_0_input_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t probe_0_input_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t probe_0_input_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t probe_0_input_0_v1 = {0, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, probe_0_input_0_quantizeParams, 2, probe_0_input_0_dims, (Qnn_TensorMemType_t)0, probe_0_input_0_clientBuf};
   Qnn_Tensor_t probe_0_input_0 = {(Qnn_TensorVersion_t)1, .v1 = probe_0_input_0_v1};

   uint32_t probe_0_input_1_dims[] = {2, 2};
   Qnn_QuantizeParams_t probe_0_input_1_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   static float probe_0_input_1_data[4];
   fread(probe_0_input_1_data, 4, 4, fp);
   Qnn_ClientBuffer_t probe_0_input_1_clientBuf = {(void*)probe_0_input_1_data, 16};
   Qnn_TensorV1_t probe_0_input_1_v1 = {0, "i1_transpose", (Qnn_TensorType_t)4, 0, (Qnn_DataType_t)562, probe_0_input_1_quantizeParams, 2, probe_0_input_1_dims, (Qnn_TensorMemType_t)0, probe_0_input_1_clientBuf};
   Qnn_Tensor_t probe_0_input_1 = {(Qnn_TensorVersion_t)1, .v1 = probe_0_input_1_v1};

   Qnn_Tensor_t probe_0_inputs[] = {probe_0_input_0, probe_0_input_1};
   uint32_t probe_0_output_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t probe_0_output_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t probe_0_output_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t probe_0_output_0_v1 = {0, "o0", (Qnn_TensorType_t)1, 0, (Qnn_DataType_t)562, probe_0_output_0_quantizeParams, 2, probe_0_output_0_dims, (Qnn_TensorMemType_t)0, probe_0_output_0_clientBuf};
   Qnn_Tensor_t probe_0_output_0 = {(Qnn_TensorVersion_t)1, .v1 = probe_0_output_0_v1};

   Qnn_Tensor_t probe_0_outputs[] = {probe_0_output_0};
   Qnn_OpConfigV1_t probe_0_v1 = {"probe", "qti.aisw", "FullyConnected", 0, probe_0_params, 2, probe_0_inputs, 1, probe_0_outputs};
   Qnn_OpConfig_t probe_0 = {(Qnn_OpConfigVersion_t)1, .v1 = probe_0_v1};
   VALIDATE(error, interface.backendValidateOpConfig(backend_0, probe_0));

   Qnn_Param_t* company_2_0_params = NULL;
   uint32_t company_2_0_input_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t company_2_0_input_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t company_2_0_input_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t company_2_0_input_0_v1 = {0, "i0", (Qnn_TensorType_t)0, 0, (Qnn_DataType_t)562, company_2_0_input_0_quantizeParams, 2, company_2_0_input_0_dims, (Qnn_TensorMemType_t)0, company_2_0_input_0_clientBuf};
   Qnn_Tensor_t company_2_0_input_0 = {(Qnn_TensorVersion_t)1, .v1 = company_2_0_input_0_v1};

   Qnn_Tensor_t company_2_0_inputs[] = {company_2_0_input_0};
   uint32_t company_2_0_output_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t company_2_0_output_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t company_2_0_output_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t company_2_0_output_0_v1 = {0, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, company_2_0_output_0_quantizeParams, 2, company_2_0_output_0_dims, (Qnn_TensorMemType_t)0, company_2_0_output_0_clientBuf};
   Qnn_Tensor_t company_2_0_output_0 = {(Qnn_TensorVersion_t)1, .v1 = company_2_0_output_0_v1};

   Qnn_Tensor_t company_2_0_outputs[] = {company_2_0_output_0};
   Qnn_OpConfigV1_t company_2_0_v1 = {"company_2", "qti.aisw", "ElementWiseNeg", 0, company_2_0_params, 1, company_2_0_inputs, 1, company_2_0_outputs};
   Qnn_OpConfig_t company_2_0 = {(Qnn_OpConfigVersion_t)1, .v1 = company_2_0_v1};
   VALIDATE(error, interface.backendValidateOpConfig(backend_0, company_2_0));

   Qnn_Param_t* probe_2_0_params = NULL;
   uint32_t probe_2_0_input_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t probe_2_0_input_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t probe_2_0_input_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t probe_2_0_input_0_v1 = {0, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, probe_2_0_input_0_quantizeParams, 2, probe_2_0_input_0_dims, (Qnn_TensorMemType_t)0, probe_2_0_input_0_clientBuf};
   Qnn_Tensor_t probe_2_0_input_0 = {(Qnn_TensorVersion_t)1, .v1 = probe_2_0_input_0_v1};

   uint32_t probe_2_0_input_1_dims[] = {2, 2};
   Qnn_QuantizeParams_t probe_2_0_input_1_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   static float probe_2_0_input_1_data[4];
   fread(probe_2_0_input_1_data, 4, 4, fp);
   Qnn_ClientBuffer_t probe_2_0_input_1_clientBuf = {(void*)probe_2_0_input_1_data, 16};
   Qnn_TensorV1_t probe_2_0_input_1_v1 = {0, "i1_transpose_2", (Qnn_TensorType_t)4, 0, (Qnn_DataType_t)562, probe_2_0_input_1_quantizeParams, 2, probe_2_0_input_1_dims, (Qnn_TensorMemType_t)0, probe_2_0_input_1_clientBuf};
   Qnn_Tensor_t probe_2_0_input_1 = {(Qnn_TensorVersion_t)1, .v1 = probe_2_0_input_1_v1};

   Qnn_Tensor_t probe_2_0_inputs[] = {probe_2_0_input_0, probe_2_0_input_1};
   uint32_t probe_2_0_output_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t probe_2_0_output_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t probe_2_0_output_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t probe_2_0_output_0_v1 = {0, "o0", (Qnn_TensorType_t)1, 0, (Qnn_DataType_t)562, probe_2_0_output_0_quantizeParams, 2, probe_2_0_output_0_dims, (Qnn_TensorMemType_t)0, probe_2_0_output_0_clientBuf};
   Qnn_Tensor_t probe_2_0_output_0 = {(Qnn_TensorVersion_t)1, .v1 = probe_2_0_output_0_v1};

   Qnn_Tensor_t probe_2_0_outputs[] = {probe_2_0_output_0};
   Qnn_OpConfigV1_t probe_2_0_v1 = {"probe_2", "qti.aisw", "FullyConnected", 0, probe_2_0_params, 2, probe_2_0_inputs, 1, probe_2_0_outputs};
   Qnn_OpConfig_t probe_2_0 = {(Qnn_OpConfigVersion_t)1, .v1 = probe_2_0_v1};
   VALIDATE(error, interface.backendValidateOpConfig(backend_0, probe_2_0));

   const QnnGraph_Config_t* context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_config_0[] = {NULL};
   Qnn_GraphHandle_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0;
   VALIDATE(error, interface.graphCreate(context_0, "QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0", context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_config_0, &context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0));

   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_v1 = {0, "i0", (Qnn_TensorType_t)0, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0_v1};
   VALIDATE(error, interface.tensorCreateGraphTensor(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, &context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0));

   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_v1 = {0, "o0", (Qnn_TensorType_t)1, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1_v1};
   VALIDATE(error, interface.tensorCreateGraphTensor(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, &context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1));

   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_v1 = {0, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2_v1};
   VALIDATE(error, interface.tensorCreateGraphTensor(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, &context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2));

   Qnn_Param_t* context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_params = NULL;
   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_v1 = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_0.v1.id, "i0", (Qnn_TensorType_t)0, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0_v1};

   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_inputs[] = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_input_0};
   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_v1 = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2.v1.id, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0_v1};

   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_outputs[] = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_output_0};
   Qnn_OpConfigV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_v1 = {"company", "qti.aisw", "ElementWiseNeg", 0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_params, 1, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_inputs, 1, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_outputs};
   Qnn_OpConfig_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0 = {(Qnn_OpConfigVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0_v1};
   VALIDATE(error, interface.graphAddNode(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_company_0));

   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   static float context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_data[4];
   fread(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_data, 4, 4, fp);
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_clientBuf = {(void*)context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_data, 16};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_v1 = {0, "i1_transpose", (Qnn_TensorType_t)4, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3_v1};
   VALIDATE(error, interface.tensorCreateGraphTensor(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, &context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3));

   Qnn_Param_t* context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_params = NULL;
   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_v1 = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_2.v1.id, "company", (Qnn_TensorType_t)3, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0_v1};

   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   static float context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_data[4];
   fread(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_data, 4, 4, fp);
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_clientBuf = {(void*)context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_data, 16};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_v1 = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_3.v1.id, "i1_transpose", (Qnn_TensorType_t)4, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1_v1};

   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_inputs[] = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_input_1};
   uint32_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_dims[] = {2, 2};
   Qnn_QuantizeParams_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_quantizeParams = {(Qnn_Definition_t)2147483647, (Qnn_QuantizationEncoding_t)2147483647, .scaleOffsetEncoding = {0.0, 0}};
   Qnn_ClientBuffer_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_clientBuf = {NULL, 0};
   Qnn_TensorV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_v1 = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_tensor_1.v1.id, "o0", (Qnn_TensorType_t)1, 0, (Qnn_DataType_t)562, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_quantizeParams, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_dims, (Qnn_TensorMemType_t)0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_clientBuf};
   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0 = {(Qnn_TensorVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0_v1};

   Qnn_Tensor_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_outputs[] = {context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_output_0};
   Qnn_OpConfigV1_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_v1 = {"probe", "qti.aisw", "FullyConnected", 0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_params, 2, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_inputs, 1, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_outputs};
   Qnn_OpConfig_t context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0 = {(Qnn_OpConfigVersion_t)1, .v1 = context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0_v1};
   VALIDATE(error, interface.graphAddNode(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0_probe_0));

   VALIDATE(error, interface.graphFinalize(context_0_QNNExecutionProvider_QNNExecutionProvider_15640177112148132101_1_0, NULL, NULL));

   VALIDATE(error, interface.contextFree(context_0, NULL));

   VALIDATE(error, interface.deviceFree(device_0));

   VALIDATE(error, interface.backendFree(backend_0));

   if (logging) {
     VALIDATE(error, interface.logFree(loghandle));
   }

   if (fclose(fp)) error = -1;
   return error == 0 || error == QNN_COMMON_ERROR_NOT_SUPPORTED ? 0 : error;
}
